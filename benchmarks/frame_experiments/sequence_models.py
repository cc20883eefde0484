"""Models over symbols, of like size: an LSTM, causal transformers, and a recurrent cell that parallelises over time (minGRU).

All take symbols [B, L, fields] and give logits [B, L, labels]. The transformers use rotary positions, so lengths that were
never trained are not refused by a table of positions. The gates of minGRU depend on the input alone, so its states are one
scan.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS = 64, 4


class SymbolModel(nn.Module):
    """Sum of embeddings, a core over time, a linear head."""

    def __init__(self, fields: tuple[int, ...], labels: int, width: int, core: nn.Module, core_width: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, width) for size in fields)
        self.core, self.head = core, nn.Linear(core_width, labels)

    def forward(self, symbols_BLF: Tensor) -> Tensor:
        x = torch.stack([table(symbols_BLF[..., at]) for at, table in enumerate(self.embeddings)]).sum(dim=0)
        logits: Tensor = self.head(self.core(x))
        return logits


class LSTMCore(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, hidden, batch_first=True)

    def forward(self, x_BLC: Tensor) -> Tensor:
        states: Tensor = self.lstm(x_BLC)[0]
        return states


class CausalBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BLC: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm_attention(x_BLC)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        x = x_BLC + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_mlp(x))))
        return out


def rotate(x_BHLD: Tensor) -> Tensor:
    """Rotary positions."""
    half = x_BHLD.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(x_BHLD.shape[-2])[:, None] * rates
    first, second = x_BHLD.chunk(2, dim=-1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], dim=-1
    )


class MinGRU(nn.Module):
    """h_t = (1 − z_t) h_{t−1} + z_t g(x_t) with z and g from x alone, by a scan in log space."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.value, self.out = nn.Linear(WIDTH, hidden), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.norm_mlp, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BLC: Tensor) -> Tensor:
        x = self.norm(x_BLC)
        k, v = self.gate(x), self.value(x)
        log_value = torch.where(v >= 0, (F.relu(v) + 0.5).log(), -F.softplus(-v))
        kept = torch.cumsum(-F.softplus(k), dim=1)
        states = torch.exp(kept + torch.logcumsumexp(-F.softplus(-k) + log_value - kept, dim=1))
        x = x_BLC + self.out(states)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_mlp(x))))
        return out


def build(name: str, fields: tuple[int, ...], labels: int) -> SymbolModel:
    """`lstm`, `mingru`, or `transformer_N` with N layers."""
    if name == "lstm":
        return SymbolModel(fields, labels, WIDTH, LSTMCore(WIDTH, 128), 128)
    if name == "mingru":
        return SymbolModel(fields, labels, WIDTH, nn.Sequential(MinGRU(128), MinGRU(128), nn.RMSNorm(WIDTH)), WIDTH)
    layers = int(name.removeprefix("transformer_"))
    return SymbolModel(
        fields, labels, WIDTH, nn.Sequential(*(CausalBlock() for _ in range(layers)), nn.RMSNorm(WIDTH)), WIDTH
    )


MODELS = ("lstm", "transformer_1", "transformer_2", "transformer_4", "mingru")
