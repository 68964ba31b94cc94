"""Images: where they come from, two views of each, batches (see images.py first)."""
