"""Rows of accepted updates, as the ledger has them."""

from fcil_server.ledger.enums import UpdateStatus
from fcil_server.ledger.rows import UpdateRow


def update_row(client, *, samples=1, base_state=None, sum_id=None):
    """Return the row of a client's update in a training round."""
    return UpdateRow(
        run="r", client=client, task=0, kind="train", round=0, update_id=f"u{client}",
        accepted_at=0.0, samples=samples, tensor_bytes=1, sealed_bytes=1,
        status=UpdateStatus.ACCEPTED, reason="", train_loss=None, train_accuracy=None,
        base_state=base_state, sum_id=sum_id,
    )  # fmt: skip
