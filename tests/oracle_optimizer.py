"""The optimizer's rules in plain numpy, float64, one matrix at a time, as the report writes them."""

from __future__ import annotations

import math

import numpy as np


def oracle_rate(step: int, peak: float, final: float, warmup: int, start: float, end: float) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    if step < start:
        return peak
    if step >= end:
        return final
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * (step - start) / (end - start)))


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    if matrix.shape[0] > matrix.shape[1]:
        return newton_schulz(matrix.T).T
    x = matrix / np.linalg.norm(matrix)
    for a, b, c in [(3.4445, -4.7750, 2.0315)] * 8 + [(2, -1.5, 0.5)] * 2:
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


def oracle_muon(weight: np.ndarray, gradients: list[np.ndarray], rates: list[float], parts: int) -> np.ndarray:
    """A stack of matrices [..., rows, columns], each cut into `parts` along its rows."""
    *stack, rows, columns = weight.shape
    weight, momentum = weight.copy(), np.zeros_like(weight)
    for gradient, rate in zip(gradients, rates, strict=True):
        momentum = 0.95 * momentum + gradient
        mixed = 0.95 * momentum + gradient
        for index in np.ndindex(*stack):
            for part in range(parts):
                own = slice(part * rows // parts, (part + 1) * rows // parts)
                update = newton_schulz(mixed[index][own]) * math.sqrt(max(rows // parts, columns)) * 0.18
                weight[index][own] = weight[index][own] * (1 - rate * 0.1) - rate * update
    return weight


def oracle_adamw(weight: np.ndarray, gradients: list[np.ndarray], rates: list[float], decay: float) -> np.ndarray:
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for count, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        update = first / (1 - 0.9**count) / (np.sqrt(second / (1 - 0.95**count)) + 1e-20)
        weight = weight - rate * (update + decay * weight)
    return weight


class OracleTable:
    """A matrix under the Sinkhorn rule, given its whole gradient or rows of it."""

    def __init__(self, table: np.ndarray, threshold: float = 1e-3):
        self.table, self.momentum, self.threshold = table.astype(np.float64), np.zeros(table.shape), threshold

    def step(self, ids: np.ndarray, gradients: np.ndarray, rate: float) -> None:
        whole = np.zeros_like(self.table)
        np.add.at(whole, ids, gradients)
        self.dense_step(whole, rate)

    def dense_step(self, gradient: np.ndarray, rate: float) -> None:
        self.momentum = 0.95 * self.momentum + 0.05 * gradient
        update = 0.95 * self.momentum + 0.05 * gradient
        norms = np.sqrt((update**2).sum(1))
        update[norms <= self.threshold * norms.mean()] = 0
        for count in range(1, 12):
            axis = 1 if count % 2 else 0
            update = update / (np.sqrt((update**2).sum(axis, keepdims=True)) + 1e-20)
        self.table -= 0.18 * rate * math.sqrt(self.table.shape[1]) * update


def sinkhorn_update(weight: np.ndarray, gradients: list[np.ndarray], rates: list[float]) -> np.ndarray:
    table = OracleTable(weight)
    for gradient, rate in zip(gradients, rates, strict=True):
        table.dense_step(gradient, rate)
    return table.table
