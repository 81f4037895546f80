"""The documents as a site: `scripts/site` builds it with MkDocs."""
