"""Carts with poles, one after the other."""

import math
import random


class Environments:
    def __init__(self, count):
        self.count = count

    def reset(self):
        self.states = [[random.uniform(-0.05, 0.05) for _ in range(4)] for _ in range(self.count)]
        return self.states

    def step(self, actions):
        rewards = []
        for i, action in enumerate(actions):
            x, v, angle, spin = self.states[i]
            for _ in range(16):
                push = (10.0 if action else -10.0) + 0.05 * spin * spin * math.sin(angle)
                turn = (9.8 * math.sin(angle) - math.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2))
                x, v, angle, spin = x + 0.005 * v, v + 0.005 * push, angle + 0.005 * spin, spin + 0.005 * turn
            if abs(angle) > 0.2 or abs(x) > 2.4:
                x = v = angle = spin = 0.0
                rewards.append(0.0)
            else:
                rewards.append(1.0)
            self.states[i] = [x, v, angle, spin]
        return self.states, rewards
