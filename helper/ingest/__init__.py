"""From a posted body to an accepted share: payload schema, validation and admission."""
