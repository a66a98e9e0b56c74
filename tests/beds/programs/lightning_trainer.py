"""Lightning's Trainer on a small model, with orch's callback: it saves every five steps, and when
the run must end.

Arguments: steps, folder, seconds a step. Rank 0 writes a line for each step into `steps.txt` of the
folder: time, step, ranks, loss. All ranks share one batch, so the losses are the same on any number
of ranks.
"""

import os
import sys
import time
from pathlib import Path

import pytorch_lightning as pl
import torch

import orch_report


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def training_step(self, batch, index):
        time.sleep(0 if Path(sys.argv[2], "hurry").exists() else float(sys.argv[3]))
        loss = ((batch[0] @ self.weight - batch[0].sum(1)) ** 2).mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class History(pl.Callback):
    """Writes the loss of each step."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.is_global_zero:
            loss = trainer.callback_metrics["train_loss"].item()
            with Path(sys.argv[2], "steps.txt").open("a") as file:
                step = trainer.global_step
                file.write(f"{time.time()} {step} {trainer.world_size} {loss:.6f}\n")


def main() -> None:
    torch.manual_seed(0)
    os.makedirs(sys.argv[2], exist_ok=True)
    world = int(os.environ.get("WORLD_SIZE", 1))
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(8, 4)), batch_size=8 // world
    )
    checkpoints = pl.callbacks.ModelCheckpoint(
        sys.argv[2],
        filename="step-{step:09}",
        auto_insert_metric_name=False,
        every_n_train_steps=5,
        enable_version_counter=False,
    )
    trainer = pl.Trainer(
        max_steps=int(sys.argv[1]), max_epochs=-1, accelerator="cpu", devices=world, strategy="ddp",
        log_every_n_steps=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[History(), orch_report.lightning_callback(sys.argv[2]), checkpoints],
    )  # fmt: skip
    last = orch_report.newest_checkpoint(sys.argv[2])
    print("starts from", last, flush=True)
    trainer.fit(Line(), data, ckpt_path=last)
    print("trained to", trainer.global_step, flush=True)


main()
