"""Proofs are made in worker processes, so that they never slow down an answer and can be killed."""

from helper.prover.job import ProofJob
from helper.prover.pool import ProverPool, WorkerCommand

__all__ = ["ProofJob", "ProverPool", "WorkerCommand"]
