"""Checkpoints of a model: the released safetensors format and an Orbax folder, read, written, converted and verified.

`released` reads parameters from either folder; `save_released` and `orbax` write; `convert` goes from one to the other,
streamed and resumable, with `checksum`s; `verify` and `first_layers` examine a folder.
"""
