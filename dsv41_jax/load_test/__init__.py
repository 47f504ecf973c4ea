"""Load on a running server, over its socket, and what it answers: `launch/bench.py serve`.

workload   which requests, and when     connection   one HTTP exchange      client   one request, timed
drive      many of them                 report       numbers and tables     picture  the same, drawn
"""
