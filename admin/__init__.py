"""Validator onboarding: registrations signed in browser wallets, and the published voting configuration."""
