"""TRL's SFTTrainer on a tiny random Llama, whose tokenizer and texts are made here: nothing is
downloaded. It saves every five steps, and when the run must end.

Arguments: steps, folder, seconds a step. Rank 0 writes a line for each step into `steps.txt` of the
folder: time, step, ranks, loss.
"""

import os
import random
import sys
import time
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

import orch_report

BATCH = 8  # of all ranks
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


class History(TrainerCallback):
    """Writes the loss of each step."""

    def __init__(self, folder: Path, step_s: float) -> None:
        self.folder = folder
        self.step_s = step_s

    def on_step_begin(self, args, state, control, **others):
        time.sleep(0 if (self.folder / "hurry").exists() else self.step_s)

    def on_log(self, args, state, control, logs=None, **others):
        if state.is_world_process_zero and "loss" in logs:
            with (self.folder / "steps.txt").open("a") as file:
                file.write(f"{time.time()} {state.global_step} {args.world_size} {logs['loss']}\n")


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
    )


def complete_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint whose last file has been written."""
    states = folder.glob("checkpoint-*/trainer_state.json")
    steps = [int(state.parent.name.removeprefix("checkpoint-")) for state in states]
    return str(folder / f"checkpoint-{max(steps)}") if steps else None


def main() -> None:
    steps = int(sys.argv[1])
    folder = Path(sys.argv[2])
    set_seed(0)
    choice = random.Random(0)
    texts = [{"text": " ".join(choice.choices(WORDS, k=12))} for _ in range(256)]
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    args = SFTConfig(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=BATCH // int(os.environ["WORLD_SIZE"]),
        logging_steps=1,
        save_steps=5,
        save_total_limit=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        use_cpu=True,
        ddp_backend="gloo",
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        args,
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer,
        callbacks=[orch_report.hf_callback(), History(folder, float(sys.argv[3]))],
    )
    trainer.train(resume_from_checkpoint=complete_checkpoint(folder))


main()
