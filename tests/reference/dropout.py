"""Naive twin of trainer.model.dropout: the same counters with Python's integers, one element after
the other."""

import hashlib

import torch

WORD = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
FIRST = 0xFF51AFD7ED558CCD
SECOND = 0xC4CEB9FE1A85EC53


def mix(x):
    x = (x ^ (x >> 32)) * FIRST & WORD
    x = (x ^ (x >> 29)) * SECOND & WORD
    return x ^ (x >> 32)


def keep(row, column, rate):
    """The product is read as a signed number and compared with the quantile `rate` of all of
    them."""
    x = row * (column | 1) & WORD
    return (x ^ 1 << 63) >= int(rate * 2.0**64)


def salt(seed, name):
    return int.from_bytes(
        hashlib.blake2b(f"{seed}/dropout/{name}".encode(), digest_size=8).digest(), "little"
    )


def hidden(x, serial, seed, name, rate):
    """[b, s, h]: element by element."""
    b, s, h = x.shape
    name_salt = salt(seed, name)
    columns = [mix(j * STEP & WORD) for j in range(h)]
    rows = [[mix(int(serial[i, j]) * STEP + name_salt & WORD) for j in range(s)] for i in range(b)]
    mask = torch.tensor(
        [[[keep(row, column, rate) for column in columns] for row in line] for line in rows]
    )
    return torch.where(mask, x / (1 - rate), 0.0)


def probabilities(weights, serial, head, seed, name, rate):
    """[b, s, s] of one head."""
    name_salt = salt(seed, name)
    of_head = mix(head * STEP & WORD)
    rows = [[mix(int(n) * STEP + name_salt & WORD) for n in line] for line in serial]
    columns = [[mix(int(n) * STEP + of_head & WORD) for n in line] for line in serial]
    mask = [
        [[keep(q, k, rate) for k in keys] for q in queries]
        for queries, keys in zip(rows, columns, strict=True)
    ]
    return torch.where(torch.tensor(mask), weights / (1 - rate), 0.0)
