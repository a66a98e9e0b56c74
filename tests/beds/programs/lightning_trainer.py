"""Lightning's Trainer on a small model, with orch's callback. Arguments: steps, folder, seconds a
step."""

import os
import sys
import time

import pytorch_lightning as pl
import torch

import orch_report


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def training_step(self, batch, index):
        time.sleep(float(sys.argv[3]))
        loss = ((batch[0] @ self.weight - batch[0].sum(1)) ** 2).mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main() -> None:
    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(512, 4)), batch_size=4
    )
    world = int(os.environ.get("WORLD_SIZE", 1))
    trainer = pl.Trainer(
        max_steps=int(sys.argv[1]), max_epochs=-1, accelerator="cpu", devices=world, strategy="ddp",
        log_every_n_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[orch_report.lightning_callback(sys.argv[2])],
    )  # fmt: skip
    last = orch_report.newest_checkpoint(sys.argv[2])
    print("starts from", last, flush=True)
    trainer.fit(Line(), data, ckpt_path=last)
    print("trained to", trainer.global_step, flush=True)


main()
