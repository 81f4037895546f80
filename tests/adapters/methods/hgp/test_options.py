"""HGP's options, presets and schemas."""

from __future__ import annotations

import pytest

from adapters.hgp_reference import SMALL
from adapters.kit import toy_backbone
from fcil_adapters.contract.registry import make_hparams, schema_digest
from fcil_adapters.methods.hgp import METHOD
from fcil_protocol.errors import ConfigError


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


class TestOptions:
    def test_presets_are_the_papers_letter_and_the_published_code(self):
        chosen = {p: make_hparams(METHOD, {"preset": p}) for p in ("paper", "repo")}
        paper, repo = chosen["paper"], chosen["repo"]
        assert (paper.cov, paper.sampling_scale, paper.resample) == ("full", 3, "round")
        assert (paper.pixels, paper.query, paper.head_loss) == ("unit", "view", "ce")
        assert (repo.cov, repo.sampling_scale, repo.resample) == ("diag", 3, "epoch")
        assert (repo.class_weights, repo.head_loss) == ("uniform", "ce_logit_norm")
        assert (repo.schedule, repo.clip_norm, repo.min_count_upload) == ("constant", 1, 2)
        assert {h.rebalance for h in chosen.values()} == {"seen"}

    def test_the_scale_follows_the_covariance_unless_given(self):
        scales = {c: make_hparams(METHOD, {"cov": c}).sampling_scale for c in ("full", "lowrank")}
        assert scales == {"full": 3, "lowrank": 3}
        assert make_hparams(METHOD, {"cov": "diag"}).sampling_scale == 1
        assert make_hparams(METHOD, {"cov": "diag", "cov_scale": 2}).sampling_scale == 2

    @pytest.mark.parametrize(
        "options", [{"blocks": [0, 0]}, {"blocks": [-1]}, {"blocks": []}, {"length": 3}]
    )
    def test_wrong_values_are_refused(self, options):
        with pytest.raises(ConfigError, match=next(iter(options))):
            make_hparams(METHOD, options)

    def test_a_block_that_the_backbone_lacks_is_named(self, backbone):
        h = make_hparams(METHOD, {"blocks": [0, 2]})
        for schemas in (METHOD.exchanges, METHOD.broadcast):
            with pytest.raises(ConfigError, match="block 2 does not exist; .* blocks 0 to 1"):
                schemas(h, backbone.info)

    def test_options_that_change_payloads_change_the_digest(self, backbone):
        options = ({}, {"pool_sharing": "shared"}, {"cov": "full"}, {"cov": "diag"}, {"prompts": 4})
        digests = {
            schema_digest(METHOD, make_hparams(METHOD, {**SMALL, **o}), backbone.info)
            for o in options
        }
        assert len(digests) == len(options)


def test_uploads_carry_prompts_head_gaussians_and_counts_alone(backbone):
    h = make_hparams(METHOD, SMALL)
    kinds = {t.kind for e in METHOD.exchanges(h, backbone.info) for t in e.upload.tensors}
    assert kinds == {"prompt", "key", "head", "gaussian", "count"}
