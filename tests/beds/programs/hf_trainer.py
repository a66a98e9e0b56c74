"""The Trainer of transformers on a small model, with our callback. Arguments: steps, output folder,
seconds a step."""

import os
import sys
import time

import torch

sys.modules["datasets"] = None  # transformers would import it, and pandas, which takes seconds
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

import orch_report  # noqa: E402


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict:
        return {"loss": ((x @ self.weight - labels) ** 2).mean()}


class Slow(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        time.sleep(float(sys.argv[3]))


def main() -> None:
    torch.manual_seed(0)
    os.makedirs(sys.argv[2], exist_ok=True)  # the Trainer makes it on rank 0 alone, some time
    x = torch.randn(512, 4)
    data = [{"x": row, "labels": row.sum()} for row in x]
    backend = "gloo" if "WORLD_SIZE" in os.environ else None
    args = TrainingArguments(
        sys.argv[2], max_steps=int(sys.argv[1]), per_device_train_batch_size=4, logging_steps=2, save_strategy="no",
        use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=0.05, ddp_backend=backend,
    )  # fmt: skip
    trainer = Trainer(
        Line(), args, train_dataset=data, callbacks=[orch_report.hf_callback(), Slow()]
    )
    last = get_last_checkpoint(sys.argv[2])
    print("starts from", last, flush=True)
    trainer.train(resume_from_checkpoint=last)
    print("trained to", trainer.state.global_step, flush=True)


main()
