"""Naive twin of multi-token prediction, written from the paper (DeepSeek-V3, arXiv 2412.19437,
section 2.2)."""

import torch

from . import transformer


def loss(w, model, state, batch, drop, terms):
    """The sum of all further predictions' losses, weighed, not divided by tokens. `state` [b, s,
    hidden]: what the output projection reads. What experts add to the loss goes into the dict
    `terms`."""
    total = state.new_zeros(())
    length = batch.tokens.shape[1]
    for k in range(1, model.mtp.depth + 1):
        name = f"layers.{model.layers + k - 1}"
        rows = []
        for sequence, states in zip(batch.tokens.tolist(), state, strict=True):
            later = [sequence[i + k] if i + k < length else 0 for i in range(length)]
            token = transformer.norm(w["embed.weight"][later], w, f"{name}.norm_token", model)
            hidden = transformer.norm(states, w, f"{name}.norm_hidden", model)
            pairs = [
                w[f"{name}.project.weight"] @ torch.cat(both)
                for both in zip(token, hidden, strict=True)
            ]
            rows.append(torch.stack(pairs))
        kind = model.layers - 1
        out = transformer.block(
            torch.stack(rows),
            w,
            name,
            kind,
            model,
            batch.positions,
            transformer.numbers_of(batch),
            drop,
            terms,
        )
        state = transformer.norm(out, w, f"{name}.norm_out", model)
        scores = transformer.scores(state, w, model)
        for b in range(len(scores)):
            for i in range(length - k):
                numbers = transformer.numbers_of(batch)
                apart = numbers is not None and numbers[b, i] != numbers[b, i + k]
                target = int(batch.targets[b, i + k])
                if not apart and target != -100:
                    token_loss = scores[b, i].exp().sum().log() - scores[b, i, target]
                    total = total + model.mtp.weight * token_loss / model.mtp.depth
    return total
