//! The vote commitment tree: append-only, depth 24, stored as one array per level.
//!
//! Only *complete* nodes are stored (all leaves below them present), so that a stored node never changes. Roots and
//! paths of every past size can be computed: complete nodes are looked up, and the partial node of each level, of which
//! there is at most one (at the right edge), is computed from the leaves up.

use std::sync::OnceLock;

use ff::{Field, PrimeField};

use crate::errors::{Error, Result};
use crate::fields::{self, Base, Encoded, ELEMENT};
use crate::poseidon::poseidon;

/// Levels between a leaf and the root.
pub const DEPTH: usize = 24;
/// Leaves of a full tree.
pub const CAPACITY: u64 = 1 << DEPTH;
/// Levels of inner nodes of a stored subtree.
const SUBTREE_DEPTH: usize = 10;
/// Leaves of a subtree.
pub const SUBTREE_LEAVES: usize = 1 << SUBTREE_DEPTH;
/// Inner nodes of a subtree.
const SUBTREE_NODES: usize = SUBTREE_LEAVES - 1;

/// Hashes of empty subtrees by height: the empty leaf is Poseidon(0, 0).
pub fn empty(level: usize) -> Base {
    static EMPTY: OnceLock<[Base; DEPTH + 1]> = OnceLock::new();
    EMPTY.get_or_init(|| {
        let mut hashes = [node(Base::ZERO, Base::ZERO); DEPTH + 1];
        for level in 1..=DEPTH {
            hashes[level] = node(hashes[level - 1], hashes[level - 1]);
        }
        hashes
    })[level]
}

fn node(left: Base, right: Base) -> Base {
    poseidon(&[left, right])
}

/// The tree.
#[derive(Clone, Default)]
pub struct Tree {
    /// `levels[k][i]` is the complete node i of height k; `levels[0]` are the leaves.
    levels: [Vec<Base>; DEPTH + 1],
}

impl Tree {
    /// Number of leaves.
    pub fn len(&self) -> u64 {
        self.levels[0].len() as u64
    }

    /// Whether there is no leaf.
    pub fn is_empty(&self) -> bool {
        self.levels[0].is_empty()
    }

    /// Appends leaves; amortised one hash each. Fails if the tree's capacity is exceeded.
    pub fn append(&mut self, leaves: &[Base]) -> Result<()> {
        if self.len() + leaves.len() as u64 > CAPACITY {
            return Err(Error::Tree(format!("a tree has at most {CAPACITY} leaves")));
        }
        self.levels[0].extend_from_slice(leaves);
        self.complete();
        Ok(())
    }

    /// Hashes all nodes that became complete.
    fn complete(&mut self) {
        for level in 0..DEPTH {
            let (below, above) = self.levels.split_at_mut(level + 1);
            let (below, above) = (&below[level], &mut above[0]);
            let missing = &below[above.len() * 2..];
            above.extend(missing.chunks_exact(2).map(|pair| node(pair[0], pair[1])));
        }
    }

    /// The leaf at a position.
    pub fn leaf(&self, position: u64) -> Result<Encoded> {
        match self.levels[0].get(position as usize) {
            Some(leaf) => Ok(leaf.to_repr()),
            None => Err(self.out_of_range("leaf", position)),
        }
    }

    /// Root of the tree of the first `size` leaves.
    pub fn root(&self, size: u64) -> Result<Encoded> {
        self.check_size(size)?;
        let mut partial = None;
        for level in 0..DEPTH {
            partial = self.next_partial(level, size, partial);
        }
        let root = match (partial, size) {
            (Some(root), _) => root,
            (None, 0) => empty(DEPTH),
            (None, _) => self.levels[DEPTH][0],
        };
        Ok(root.to_repr())
    }

    /// The 24 siblings from a leaf up, in the tree of the first `size` leaves.
    pub fn path(&self, position: u64, size: u64) -> Result<[Encoded; DEPTH]> {
        self.check_size(size)?;
        if position >= size {
            return Err(Error::Tree(format!(
                "leaf {position} is out of range for a tree of {size} leaves"
            )));
        }
        let mut partial = None;
        let mut path = [[0; ELEMENT]; DEPTH];
        for (level, sibling) in path.iter_mut().enumerate() {
            let index = (position >> level) ^ 1;
            let complete = size >> level;
            *sibling = if index < complete {
                self.levels[level][index as usize]
            } else if index == complete {
                partial.unwrap_or(empty(level))
            } else {
                empty(level)
            }
            .to_repr();
            partial = self.next_partial(level, size, partial);
        }
        Ok(path)
    }

    /// The partial node of `level + 1` at a size, from the partial node of `level`. `None` if all nodes are complete.
    fn next_partial(&self, level: usize, size: u64, partial: Option<Base>) -> Option<Base> {
        let complete = (size >> level) as usize;
        if complete % 2 == 1 {
            let left = self.levels[level][complete - 1];
            Some(node(left, partial.unwrap_or(empty(level))))
        } else {
            partial.map(|left| node(left, empty(level)))
        }
    }

    /// Inner nodes of the complete subtree of 1,024 leaves at `index`: 512 of height 1, 256 of height 2, … 1 of 10.
    pub fn subtree(&self, index: u64) -> Result<Vec<u8>> {
        if index >= self.len() / SUBTREE_LEAVES as u64 {
            return Err(self.out_of_range("complete subtree", index));
        }
        let mut bytes = Vec::with_capacity(SUBTREE_NODES * ELEMENT);
        for level in 1..=SUBTREE_DEPTH {
            let width = SUBTREE_LEAVES >> level;
            let from = index as usize * width;
            for element in &self.levels[level][from..from + width] {
                bytes.extend_from_slice(&element.to_repr());
            }
        }
        Ok(bytes)
    }

    /// Restores a tree from its leaves and the stored subtrees 0..k; missing nodes are hashed again.
    /// The stored nodes are not checked: compare the root before use.
    pub fn restore(leaves: Vec<Base>, subtrees: &[u8]) -> Result<Self> {
        if leaves.len() as u64 > CAPACITY {
            return Err(Error::Tree(format!("a tree has at most {CAPACITY} leaves")));
        }
        if !subtrees.len().is_multiple_of(SUBTREE_NODES * ELEMENT) {
            return Err(Error::Tree("subtrees are incomplete".into()));
        }
        let stored = subtrees.len() / (SUBTREE_NODES * ELEMENT);
        if stored > leaves.len() / SUBTREE_LEAVES {
            return Err(Error::Tree(
                "too many subtrees for the number of leaves".into(),
            ));
        }
        let mut tree = Tree::default();
        tree.levels[0] = leaves;
        for subtree in subtrees.chunks_exact(SUBTREE_NODES * ELEMENT) {
            tree.restore_subtree(subtree)?;
        }
        tree.complete();
        Ok(tree)
    }

    fn restore_subtree(&mut self, subtree: &[u8]) -> Result<()> {
        let mut rest = subtree;
        for level in 1..=SUBTREE_DEPTH {
            let (nodes, above) = rest.split_at((SUBTREE_LEAVES >> level) * ELEMENT);
            let nodes = fields::bases("node", nodes)
                .map_err(|_| Error::Tree("a subtree contains an invalid node".into()))?;
            self.levels[level].extend(nodes);
            rest = above;
        }
        Ok(())
    }

    fn check_size(&self, size: u64) -> Result<()> {
        if size > self.len() {
            return Err(self.out_of_range("size", size));
        }
        Ok(())
    }

    fn out_of_range(&self, what: &str, number: u64) -> Error {
        Error::Tree(format!(
            "{what} {number} is out of range: the tree has {} leaves",
            self.len()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{rngs::StdRng, Rng, SeedableRng};
    use vote_commitment_tree::MemoryTreeServer;
    use voting_crypto_deps::pasta_curves::{group::ff::PrimeField as _, Fp};

    fn leaves(rng: &mut StdRng, count: usize) -> Vec<Base> {
        (0..count).map(|_| Base::random(&mut *rng)).collect()
    }

    fn published(leaf: &Base) -> Fp {
        Fp::from_repr(leaf.to_repr()).unwrap()
    }

    /// Random trees in random blocks: all roots and paths equal those of the published crate.
    #[test]
    fn equals_the_published_tree() {
        let mut rng = StdRng::seed_from_u64(3);
        for _ in 0..4 {
            let mut tree = Tree::default();
            let mut reference = MemoryTreeServer::empty();
            let mut sizes = Vec::new();
            for height in 1..=12u32 {
                let count = rng.gen_range(1..12);
                let block = leaves(&mut rng, count);
                tree.append(&block).unwrap();
                for leaf in &block {
                    reference.append(published(leaf)).unwrap();
                }
                reference.checkpoint(height).unwrap();
                sizes.push((height, tree.len()));
            }
            for &(height, size) in &sizes {
                let root = reference.root_at_height(height).unwrap();
                assert_eq!(tree.root(size).unwrap(), root.to_repr());
                let position = rng.gen_range(0..size);
                let path = reference.path(position, height).unwrap();
                let expected: Vec<_> = path.auth_path().iter().map(|h| h.to_bytes()).collect();
                assert_eq!(tree.path(position, size).unwrap().to_vec(), expected);
            }
        }
    }

    #[test]
    fn restored_tree_equals_appended_tree() {
        let mut rng = StdRng::seed_from_u64(4);
        let leaves = leaves(&mut rng, 2 * SUBTREE_LEAVES + 77);
        let mut tree = Tree::default();
        tree.append(&leaves).unwrap();
        let subtrees = [tree.subtree(0).unwrap(), tree.subtree(1).unwrap()].concat();
        let first = &subtrees[..SUBTREE_NODES * ELEMENT];
        for stored in [&[][..], first, &subtrees] {
            let restored = Tree::restore(leaves.clone(), stored).unwrap();
            assert!(restored.levels == tree.levels);
        }
        assert!(tree.subtree(2).is_err());
        assert!(Tree::restore(leaves[..2047].to_vec(), &subtrees).is_err());
        assert!(Tree::restore(leaves.clone(), &subtrees[1..]).is_err());
        assert!(Tree::restore(leaves, &[0xff; SUBTREE_NODES * ELEMENT]).is_err());
    }
}
