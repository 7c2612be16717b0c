"""Family `retrieval`: a datastore of responses, and drafting from it."""
