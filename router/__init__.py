"""The router: the one address that clients know; it balances the pools and repairs after failures."""
