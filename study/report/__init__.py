"""Exported runs in; tables, figures, verdicts and pages out. The same runs give the same bytes on every machine;
neither torch nor MLflow is imported, and no run folder is opened.
"""
