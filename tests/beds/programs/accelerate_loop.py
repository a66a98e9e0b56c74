"""A loop of one's own with accelerate: it saves every five steps and when the run must end.

Arguments: steps, folder, seconds a step. Rank 0 writes a line for each step into `steps.txt` of the
folder: time, step, ranks, loss. Batches are split among the ranks, so the losses are the same on
any number of ranks.
"""

import shutil
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration

import orch_report

BATCH = 8
SAVE_EVERY = 5


def save(accelerator: Accelerator, folder: Path, step: int) -> None:
    part = folder / "part"
    accelerator.save_state(str(part))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        part.rename(folder / f"step-{step:06}")
        for old in sorted(folder.glob("step-*"))[:-2]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def main() -> None:
    steps = int(sys.argv[1])
    folder = Path(sys.argv[2])
    step_s = float(sys.argv[3])
    orch_report.save_requested()
    accelerator = Accelerator(
        cpu=True,
        log_with=orch_report.accelerate_tracker(),
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    accelerator.init_trackers("loop")
    torch.manual_seed(0)
    inputs = torch.randn(BATCH * steps, 4)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1))
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    orch_report.watch(model)
    checkpoints = sorted(folder.glob("step-*"))
    first_step = 0
    if checkpoints:
        accelerator.load_state(str(checkpoints[-1]))
        first_step = int(checkpoints[-1].name.removeprefix("step-"))
    if accelerator.is_main_process:
        shutil.rmtree(folder / "part", ignore_errors=True)
    accelerator.wait_for_everyone()
    batches = accelerator.skip_first_batches(loader, first_step)
    for step, (x, target) in enumerate(batches, start=first_step + 1):
        time.sleep(0 if (folder / "hurry").exists() else step_s)
        loss = torch.nn.functional.mse_loss(model(x).squeeze(1), target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = accelerator.gather(loss.detach()).mean().item()
        accelerator.log({"loss": mean_loss, "samples": BATCH * step}, step=step)
        if accelerator.is_main_process:
            with (folder / "steps.txt").open("a") as file:
                file.write(f"{time.time()} {step} {accelerator.num_processes} {mean_loss:.6f}\n")
        must_save = orch_report.must_save()
        if must_save or step % SAVE_EVERY == 0:
            with orch_report.phase("save"):
                save(accelerator, folder, step)
        if must_save:
            orch_report.exit_saved(step)
    accelerator.end_training()


main()
