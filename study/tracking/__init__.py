"""A run as MLflow shows it. The folder of the run is the truth and is only read here: whatever the store has lost is
sent again, and training never waits for it.
"""
