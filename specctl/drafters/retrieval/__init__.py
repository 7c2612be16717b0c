"""Family `retrieval`: a drafter that looks up continuations in a datastore of responses."""
