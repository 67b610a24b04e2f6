"""Moving bytes between ranks: transports, the dtype table, packs and the choice among them."""
