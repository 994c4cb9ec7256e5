"""The commands of `python -m moe_patch`, one a file, and what they share (`running`).

Each file ends with its COMMAND; `__main__.py` has the list.
"""
