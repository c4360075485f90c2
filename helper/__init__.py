"""The share-reveal helper: takes encrypted vote shares from wallets and reveals each at its wallet's time."""
