"""Times against Hugging Face's implementations, after parity holds: one kind a file.

`timing` is the clock, `kind` what every kind declares: its arguments, what it refuses, how it
measures its rows, the table that shows them. `commands/bench.py` parses, writes and prints.

To add a kind, add a file here, and nothing elsewhere: a subclass of `kind.Timed`, and at the end of
the file `KIND = ThatClass()`. `python -m moe_patch bench NAME` finds it. (tests/test_layout.py asks
for the file's place in FLOORS, as for every module.) `peers` is a folder, with a file a peer.
"""
