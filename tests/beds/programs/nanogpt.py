"""A small GPT on characters, trained by plain torch DDP. It saves its weights and the optimizer into
one file every five steps, and starts again from that file. It uses nothing of orch.

Arguments: steps, folder, seconds a step. Rank 0 writes a line for each step into `steps.txt` of the
folder: time, step, ranks, loss. All ranks share one batch, so the losses are the same on any number
of ranks.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

BATCH = 8
CONTEXT = 32
WIDTH = 32
SAVE_EVERY = 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, 4, WIDTH // 4)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        logits = self.head(self.blocks(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of(text: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
    own_starts = starts[dist.get_rank() :: dist.get_world_size()].tolist()
    tokens = torch.stack([text[start : start + CONTEXT] for start in own_starts])
    targets = torch.stack([text[start + 1 : start + CONTEXT + 1] for start in own_starts])
    return tokens, targets


def main() -> None:
    steps = int(sys.argv[1])
    folder = Path(sys.argv[2])
    step_s = float(sys.argv[3])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    model = nn.parallel.DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint = folder / "checkpoint.pt"
    first_step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"]
    for step in range(first_step + 1, steps + 1):
        time.sleep(0 if (folder / "hurry").exists() else step_s)
        loss = model(*batch_of(text, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean_loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean_loss)
        if dist.get_rank() == 0:
            with (folder / "steps.txt").open("a") as file:
                file.write(f"{time.time()} {step} {dist.get_world_size()} {mean_loss.item():.6f}\n")
            if step % SAVE_EVERY == 0:
                state = {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                }
                part = checkpoint.with_suffix(".part")
                torch.save(state, part)
                part.replace(checkpoint)
    dist.barrier()  # none closes its connections while another still sums
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
