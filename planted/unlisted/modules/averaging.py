"""Several exponential averages of a network's weights."""

import torch


class Average:
    def __init__(self, net, decays):
        self.kept = {decay: {k: v.clone() for k, v in net.state_dict().items()} for decay in decays}

    @torch.no_grad()
    def update(self, net):
        for decay, kept in self.kept.items():
            for name, value in net.state_dict().items():
                kept[name].mul_(decay)
                kept[name].add_(value * (1 - decay))
