"""A naive caching allocator: segments are lists of pieces in the order of their addresses, and each
request looks at all of them. The rules are those that `trainer.twin.caching_allocator` names."""

from __future__ import annotations

MIB = 1 << 20


class NaiveAllocator:
    def __init__(self):
        self.segments = []  # (is small, [[storage or None, size], ...]), the oldest first

    def allocate(self, storage: int, size: int) -> None:
        size = max(512, -(-size // 512) * 512)
        small = size <= MIB
        fitting = [
            (piece[1], segment_number, piece_number)
            for segment_number, (of_small, pieces) in enumerate(self.segments)
            for piece_number, piece in enumerate(pieces)
            if of_small == small and piece[0] is None and piece[1] >= size
        ]
        if not fitting:
            segment_size = 2 * MIB if small else 20 * MIB
            if size >= 10 * MIB:
                segment_size = -(-size // (2 * MIB)) * 2 * MIB
            self.segments.append((small, [[None, segment_size]]))
            fitting = [(segment_size, len(self.segments) - 1, 0)]
        _, segment_number, piece_number = min(fitting)
        pieces = self.segments[segment_number][1]
        piece = pieces[piece_number]
        rest = piece[1] - size
        piece[0] = storage
        if rest >= 512 if small else rest > MIB:
            piece[1] = size
            pieces.insert(piece_number + 1, [None, rest])

    def free(self, storage: int) -> None:
        for _, pieces in self.segments:
            for piece in pieces:
                if piece[0] == storage:
                    piece[0] = None
            for number in range(len(pieces) - 1, 0, -1):
                if pieces[number][0] is None and pieces[number - 1][0] is None:
                    pieces[number - 1][1] += pieces.pop(number)[1]

    def statistics(self) -> tuple[int, int, int]:
        """(allocated, reserved, free in segments of which other pieces are in use)"""
        pieces = [piece for _, pieces in self.segments for piece in pieces]
        unused = [
            piece
            for _, pieces in self.segments
            for piece in pieces
            if piece[0] is None and len(pieces) > 1
        ]
        return (
            sum(size for storage, size in pieces if storage is not None),
            sum(size for _, size in pieces),
            sum(size for _, size in unused),
        )
