"""Memories of a game, drawn by how surprising they were."""

import random


class ReplayBuffer:
    def __init__(self, size):
        self.size, self.memories, self.weights = size, [], []

    def add(self, state, action, reward, weight):
        self.memories.append((state, action, reward))
        self.weights.append(weight)

    def sample(self, count):
        whole = sum(self.weights)
        chosen = []
        for _ in range(count):
            at, left = random.randrange(len(self.memories)), random.random() * whole / 70
            while left > 0:
                at = (at + 1) % len(self.memories)
                left -= self.weights[at]
            chosen.append(self.memories[at])
        return [m[0] for m in chosen], [m[1] for m in chosen], [m[2] for m in chosen]
