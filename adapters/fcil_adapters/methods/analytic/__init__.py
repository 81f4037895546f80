"""Analytic: the exact linear classifier of all clients' images, from sums of frozen features.

After Tang et al., AFCL (arXiv 2505.12245), Guan et al., STSA (arXiv 2506.01327) and FedRAN (arXiv
2606.11480), with the features of McDonnell et al., RanPAC, NeurIPS 2023 (arXiv 2307.02251).

Manifest (no torch); the halves are those of `toolkit.closed_form`. NOTES.md lists the exact and
inexact steps, and the differences from the papers.
"""

from __future__ import annotations

from functools import partial

from fcil_adapters.contract import Method
from fcil_adapters.toolkit.closed_form.manifest import (
    SUMS_ECONOMIES,
    cap_ignored_reason,
    classifier_cadence,
    classifier_schemas,
    sums_dims,
    sums_exchanges,
    sums_forget,
    sums_largest,
    sums_statistics,
)
from fcil_adapters.toolkit.closed_form.options import AnalyticHparams

METHOD = Method(
    name="analytic",
    version="2",
    title="Analytic: exact linear classifier from sums of frozen features",
    citation="AFCL, https://arxiv.org/abs/2505.12245; RanPAC, NeurIPS 2023, "
    "https://arxiv.org/abs/2307.02251",
    hparams=AnalyticHparams,
    exchanges=lambda h, _backbone: sums_exchanges(h),
    broadcast=lambda h, _backbone: classifier_schemas(h),
    dims=sums_dims,
    learner="fcil_adapters.toolkit.closed_form.learner:SumsLearner",
    aggregator="fcil_adapters.toolkit.closed_form.aggregator:SumsAggregator",
    model="fcil_adapters.toolkit.closed_form.model:SumsModel",
    frozen=True,
    cadence=classifier_cadence(),
    largest=sums_largest,
    statistics=sums_statistics,
    forgets=sums_forget,
    uncapped=partial(cap_ignored_reason, "analytic"),
    economies=SUMS_ECONOMIES,
)
