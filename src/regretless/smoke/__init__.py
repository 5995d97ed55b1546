"""Any recipe in miniature: tiny models, easy problems, a local judge."""
