"""Exported runs in; claims, tables, figures and pages out. Imports neither torch nor mlflow."""
