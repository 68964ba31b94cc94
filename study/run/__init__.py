"""A run on disk: one folder that holds its config, status, journal, checkpoints, provenance and lock, whole after a
kill at any moment; and what is read of many such folders. No tensor is computed here and no tracker is known.
"""
