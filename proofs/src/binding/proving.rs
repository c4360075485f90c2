//! Circuits: keys, proofs, verification.

use ff::PrimeField;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::{bytes, run, Number, WIRE_LIMIT};
use crate::circuit::{self, Coordinates, Item, Statement, Witness, CIRCUITS};
use crate::errors::Result;
use crate::fields::{base, base_array, below, point, Base};
use crate::hashes::{self, SHARES};
use crate::tree;

/// `(name, k, proof_bytes, fingerprint, crate)` of each circuit.
#[pyfunction]
pub fn circuits() -> Vec<(&'static str, u32, usize, &'static str, &'static str)> {
    CIRCUITS
        .iter()
        .map(|circuit| circuit.info())
        .map(|i| (i.name, i.k, i.proof_bytes, i.fingerprint, i.source))
        .collect()
}

#[pyfunction]
pub fn warm(py: Python<'_>, circuit: &str) -> PyResult<&'static str> {
    run(py, || circuit::find(circuit)?.warm())
}

#[pyfunction]
pub fn fingerprint(py: Python<'_>, circuit: &str) -> PyResult<&'static str> {
    run(py, || circuit::find(circuit)?.fingerprint())
}

#[pyfunction]
#[pyo3(signature = (circuit, *, path, position, share_comms, primary_blind, c1, c2, share_index, proposal_id, vote_decision, round_id))]
#[allow(clippy::too_many_arguments)] // a witness has ten fields
pub fn prove<'py>(
    py: Python<'py>,
    circuit: &str,
    path: &[u8],
    position: Number,
    share_comms: &[u8],
    primary_blind: &[u8],
    c1: &[u8],
    c2: &[u8],
    share_index: Number,
    proposal_id: Number,
    vote_decision: Number,
    round_id: &[u8],
) -> PyResult<(
    Bound<'py, PyBytes>,
    Bound<'py, PyBytes>,
    Bound<'py, PyBytes>,
)> {
    let proved = run(py, || {
        let circuit = circuit::find(circuit)?;
        let path = base_array("path", path)?;
        let position = below("tree_position", position.0, tree::CAPACITY)?;
        let share_comms = base_array("share_comms", share_comms)?;
        let blind = base("primary_blind", primary_blind)?;
        let (c1, c2) = (point("enc_share.c1", c1)?, point("enc_share.c2", c2)?);
        let index = below("enc_share.share_index", share_index.0, SHARES as u64)?;
        // The prover does not check this and would create a proof that the chain rejects.
        hashes::check_share_comm(&share_comms, index, blind, &c1, &c2)?;
        circuit.prove(&Witness {
            path: path.map(|element: Base| element.to_repr()),
            position: position as u32,
            share_comms: share_comms.map(|element| element.to_repr()),
            primary_blind: blind.to_repr(),
            c1: Coordinates::from(&c1),
            c2: Coordinates::from(&c2),
            share_index: index as u32,
            proposal_id: below("proposal_id", proposal_id.0, WIRE_LIMIT)?,
            vote_decision: below("vote_decision", vote_decision.0, WIRE_LIMIT)?,
            round_id: base("vote_round_id", round_id)?.to_repr(),
        })
    })?;
    Ok((
        bytes(py, proved.proof),
        bytes(py, proved.nullifier),
        bytes(py, proved.root),
    ))
}

#[pyfunction]
#[pyo3(signature = (circuit, proof, *, nullifier, c1, c2, proposal_id, vote_decision, root, round_id))]
#[allow(clippy::too_many_arguments)] // a statement has nine fields
pub fn verify(
    py: Python<'_>,
    circuit: &str,
    proof: &[u8],
    nullifier: &[u8],
    c1: &[u8],
    c2: &[u8],
    proposal_id: Number,
    vote_decision: Number,
    root: &[u8],
    round_id: &[u8],
) -> PyResult<bool> {
    run(py, || {
        let statement = statement(
            nullifier,
            c1,
            c2,
            proposal_id,
            vote_decision,
            root,
            round_id,
        )?;
        circuit::find(circuit)?.verify(proof, &statement)
    })
}

/// Proof, then the fields of `proofs.Statement` in their order.
type ItemFields<'py> = (
    Bound<'py, PyBytes>,
    Bound<'py, PyBytes>,
    Bound<'py, PyBytes>,
    Bound<'py, PyBytes>,
    Number,
    Number,
    Bound<'py, PyBytes>,
    Bound<'py, PyBytes>,
);

#[pyfunction]
pub fn verify_each(
    py: Python<'_>,
    circuit: &str,
    items: Vec<ItemFields<'_>>,
) -> PyResult<Vec<Option<String>>> {
    let parsed: Vec<_> = items
        .iter()
        .map(
            |(proof, nullifier, c1, c2, proposal, decision, root, round)| {
                let [nullifier, c1, c2, root, round] =
                    [nullifier, c1, c2, root, round].map(|value| value.as_bytes());
                statement(nullifier, c1, c2, *proposal, *decision, root, round).map(|statement| {
                    Item {
                        proof: proof.as_bytes(),
                        statement,
                    }
                })
            },
        )
        .collect();
    run(py, || {
        let circuit = circuit::find(circuit)?;
        let mut reasons = Vec::with_capacity(parsed.len());
        let mut sound = Vec::new();
        for item in parsed {
            reasons.push(item.as_ref().err().map(ToString::to_string));
            sound.extend(item.ok());
        }
        let mut outcomes = circuit::verify_each(circuit, &sound)?.into_iter();
        for reason in reasons.iter_mut().filter(|reason| reason.is_none()) {
            if outcomes.next() != Some(true) {
                *reason = Some("proof: not valid".into());
            }
        }
        Ok(reasons)
    })
}

fn statement(
    nullifier: &[u8],
    c1: &[u8],
    c2: &[u8],
    proposal_id: Number,
    vote_decision: Number,
    root: &[u8],
    round_id: &[u8],
) -> Result<Statement> {
    Ok(Statement {
        nullifier: base("share_nullifier", nullifier)?.to_repr(),
        c1: Coordinates::from(&point("enc_share.c1", c1)?),
        c2: Coordinates::from(&point("enc_share.c2", c2)?),
        proposal_id: below("proposal_id", proposal_id.0, WIRE_LIMIT)?,
        vote_decision: below("vote_decision", vote_decision.0, WIRE_LIMIT)?,
        root: base("root", root)?.to_repr(),
        round_id: base("vote_round_id", round_id)?.to_repr(),
    })
}
