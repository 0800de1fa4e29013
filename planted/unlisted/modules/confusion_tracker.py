"""Counts who is taken for whom, and keeps a running score of each kind."""


class ConfusionTracker:
    def __init__(self, kinds):
        self.kinds = kinds
        self.counts = [[0] * kinds for _ in range(kinds)]
        self.scores = []

    def update(self, guesses, truths):
        for guess, truth in zip(guesses, truths):
            self.counts[truth][guess] += 1
            self.scores.append(self.balance())
        self.scores = self.scores[-500:]

    def balance(self):
        recall = [row[i] / max(1, sum(row)) for i, row in enumerate(self.counts)]
        return sum(recall) / self.kinds
