"""What defines a run: the tree of settings and its signature, the YAML and overrides that it is merged from, and the
one line that explains a fault. No path, device or tracker belongs here: those may change between two attempts at a
run.
"""
