"""What can be recomputed and compared: seeded sampling and commitments to hidden states."""

from shoal.proofs.commitments import (
    CHUNK_TOKENS,
    MODULUS,
    TOP_K,
    ChunkDifference,
    ParsedProof,
    ProofError,
    build_proofs,
    compare_chunks,
    parse_proof,
    proof_bytes,
    split_chunks,
)
from shoal.proofs.noise import NOISE_BITS, gumbel_noise, hash_bits, hash_bits_np
from shoal.proofs.sampling import choose_tokens, token_margins

__all__ = [
    "CHUNK_TOKENS",
    "MODULUS",
    "NOISE_BITS",
    "TOP_K",
    "ChunkDifference",
    "ParsedProof",
    "ProofError",
    "build_proofs",
    "choose_tokens",
    "compare_chunks",
    "gumbel_noise",
    "hash_bits",
    "hash_bits_np",
    "parse_proof",
    "proof_bytes",
    "split_chunks",
    "token_margins",
]
