"""How an experiment opens in MLflow's UI: a prepared view of arms, columns and curves.

The UI opens on an empty page of traces and shows no metric or parameter by default. A view is kept as an experiment
tag, in the form that the UI's own "Save as new view" writes (seen in 3.17): a name, two times, and the state as
base64 of deflated JSON. A UI that does not know it falls back to its plain list.
"""

import base64
import json
import zlib
from typing import Any

from study.run.facts import DIVERGED, Place

KEY = "study"
DIVERGED_KEY = "study-diverged"
RESULTS = ("knn", "linear", "probe/top1")
CURVES = {
    "Results": ("knn",),
    "Training": ("train/excess_loss", "train/accuracy", "train/loss", "train/lr"),
    "Consistency": (
        "consistency/cosine_age_1",
        "consistency/cosine_oldest",
        "consistency/theta_distance",
        "consistency/alignment",
        "consistency/uniformity",
    ),
}
RUNS_SHOWN = 20


def tags(place: Place) -> dict[str, str]:
    """Experiment tags that keep the prepared views of a place.

    In the one that its links open the best come first and what diverged, which has no result, last. The other, in the
    UI's list of views, has what diverged first: its menu of sorts knows no tags.
    """
    state = _state(place)
    return _kept(KEY, "Arms and curves", state) | _kept(
        DIVERGED_KEY, "Diverged first", {**state, "orderByKey": f"tags.`{DIVERGED}`", "orderByAsc": True}
    )


def _kept(key: str, name: str, state: dict[str, Any]) -> dict[str, str]:
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode(), 9)).decode()
    kept = {"name": name, "createdAt": 0, "updatedAt": 0, "state": f"deflate;{packed}"}
    return {f"mlflow.sharedViewState.{key}": json.dumps(kept)}


def link(address: str, experiment_id: str, *, curves: bool) -> str:
    """Where the prepared view opens: the table of arms and results, or the curves."""
    mode = "&compareRunsMode=CHART" if curves else ""
    query = f"workflowType=machine_learning&viewStateShareKey={KEY}{mode}"
    return f"{address}/#/experiments/{experiment_id}/runs?{query}"


def _state(place: Place) -> dict[str, Any]:
    results = [place.metric, *(name for name in RESULTS if name != place.metric)]
    columns = [f"tags.`arm.{axis}`" for axis in place.axes]
    columns += [f"tags.`{name}`" for name in ("study.seed", "study.floor", DIVERGED)]
    columns += [f"metrics.`{name}`" for name in results]
    sections, charts = [], []
    for section, names in CURVES.items():
        sections.append(
            {
                "uuid": f"study-{section}",
                "name": section,
                "display": True,
                "isReordered": False,
                "deleted": False,
                "isGenerated": False,
            }
        )
        if section == "Results":
            charts += [_chart("BAR", name, f"study-{section}") for name in results]
        charts += [_chart("LINE", name, f"study-{section}") for name in names]
    return {
        "searchFilter": "",
        "orderByKey": f"metrics.`{place.metric}`",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": columns,
        "runsHiddenMode": "FIRST_20_RUNS",
        "compareRunCharts": charts,
        "compareRunSections": sections,
        "isAccordionReordered": True,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }


def _chart(kind: str, metric: str, section: str) -> dict[str, Any]:
    return {
        "uuid": f"study-{kind}-{metric}",
        "type": kind,
        "runsCountToCompare": RUNS_SHOWN,
        "metricSectionId": section,
        "deleted": False,
        "isGenerated": kind == "LINE",
        "displayName": metric,
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "lineSmoothness": 0,
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "range": {},
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }
