"""The server: HTTP and APIs in front, one event loop that batches requests behind. `launch/serve.py` starts it.

    settings     what a server is told            request      what the APIs give the engine, and what comes back
    engine       the loop and its thread          scheduler    who runs next: queues, pages, preemption
    steps        what one step tells the devices  executor     runs steps against the paged cache
    sampler      the next token of every row      followers    the other hosts of a pod repeat host 0's steps
"""
