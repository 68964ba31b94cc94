"""How an experiment opens in MLflow's UI."""

from study.run.tracked import Place

KEY = "study"


def tags(place: Place) -> dict[str, str]:
    """Experiment tags that keep the prepared view."""
    return {}


def link(address: str, experiment_id: str) -> str:
    """The address at which the UI opens the model-training view of an experiment, prepared."""
    return f"{address}/#/experiments/{experiment_id}/runs?workflowType=machine_learning&viewStateShareKey={KEY}"
