"""Methods of familiar classes: what they are called and what their docstrings say."""
# ruff: noqa: E501  (one method a line)

from __future__ import annotations

from .grammar import lines, rules

# class ## method(parameters) -> returns ## docstring
METHODS = lines("""
    {Store} ## push(self, {item}: {type}) -> None ## Push an element {onto} the {store}.
    {Store} ## pop(self) -> {type} ## Remove and return the <top|first|last> element of the {store}. Raises IndexError if it is empty.
    {Store} ## peek(self) -> {type} ## Return the <top|first> element of the {store} without removing it.
    {Store} ## is_empty(self) -> bool ## <Check|Return> whether the {store} <is empty|has no elements>.
    {Store} ## __len__(self) -> int ## Return the number of elements in the {store}.
    {Store} ## clear(self) -> None ## Remove all elements from the {store}.
    {Store} ## __contains__(self, {item}: {type}) -> bool ## Return True if {item} is in the {store}, False otherwise.
    {Store} ## __repr__(self) -> str ## Return a string representation of the {store}.
    {Store} ## size(self) -> int ## Return the <size|number of elements> of the {store}.
    {Store} ## to_list(self) -> list[{type}] ## Return the elements of the {store} as a list, in order.
    {Linked} ## insert_at_<head|tail|beginning|end>(self, {item}: {type}) -> None ## Insert a new node at the <beginning|end> of the list.
    {Linked} ## delete_<head|tail|node|first>(self) -> {type} ## Delete the <first|last> node and return its data.
    {Linked} ## reverse(self) -> None ## Reverse the list in place by changing the links between the nodes.
    {Linked} ## insert_nth(self, index: int, {item}: {type}) -> None ## Insert a node at the given index. :param index: the position :param {item}: the data of the node
    {Linked} ## search(self, {item}: {type}) -> bool ## Search the list for a node with the given data.
    {Linked} ## remove(self, {item}: {type}) -> None ## Remove the first node whose data equals {item}, if there is one.
    {Linked} ## __iter__(self) ## Iterate over the data of the nodes from head to tail.
    {Linked} ## middle(self) -> {type} ## Find the middle element with a slow and a fast pointer.
    {Tree} ## insert(self, {key}: {type}) -> None ## Insert a {key} into the tree.
    {Tree} ## search(self, {key}: {type}) -> Node | None ## Search for a {key}, return its node or None if it is not in the tree.
    {Tree} ## delete(self, {key}: {type}) -> None ## Remove the node with the given {key} <and rebalance the tree|from the tree>.
    {Tree} ## <inorder|preorder|postorder>(self) -> list[{type}] ## Return the <values|keys> of the tree in <in-order|pre-order|post-order>.
    {Tree} ## height(self) -> int ## Return the height of the tree, zero if it is empty.
    {Tree} ## get_<min|max>(self) -> {type} ## Return the <smallest|largest> {key} of the tree.
    {Tree} ## rotate_<left|right>(self, node: Node) -> Node ## Rotate the subtree at node to the <left|right> and return its new root.
    {Tree} ## is_balanced(self) -> bool ## Return True if the heights of the subtrees of every node differ by at most one.
    {Tree} ## count_<leaves|nodes>(self) -> int ## Count the <leaves|nodes> of the tree recursively.
    {Graph} ## add_edge(self, <u|source>: int, <v|target>: int, weight: float = 1.0) -> None ## Add <an|a directed> edge between two vertices to the graph.
    {Graph} ## add_vertex(self, vertex: {type}) -> None ## Add a vertex to the graph. Does nothing if it already exists.
    {Graph} ## <bfs|dfs>(self, start: int) -> list[int] ## <Breadth|Depth>-first traversal of the graph, from the start vertex. Returns the order of the visits.
    {Graph} ## has_cycle(self) -> bool ## Detect whether the graph contains a cycle.
    {Graph} ## shortest_path(self, start: int, end: int) -> list[int] ## Find a shortest path between two vertices. Returns an empty list if there is none.
    {Graph} ## <degree|in_degree|out_degree>(self, vertex: int) -> int ## Return the degree of the vertex.
    {Graph} ## topological_sort(self) -> list[int] ## Return the vertices in topological order. Raises ValueError if the graph has a cycle.
    {Graph} ## remove_edge(self, u: int, v: int) -> None ## Remove the edge between u and v, if it exists.
    {Heap} ## heapify(self, index: int) -> None ## Restore the heap property below the given index.
    {Heap} ## insert(self, {key}: {type}) -> None ## Insert a {key} into the heap and sift it up.
    {Heap} ## extract_<min|max>(self) -> {type} ## Remove and return the <smallest|largest> element of the heap.
    {Heap} ## _<sift_up|sift_down>(self, index: int) -> None ## Move the element at index <up|down> until the heap property holds.
    {Heap} ## parent(self, index: int) -> int ## Return the index of the parent of a node.
    {Table} ## <put|set|insert>(self, {key}: {type}, value: {type}) -> None ## Store a value under a {key}. An existing value is replaced.
    {Table} ## get(self, {key}: {type}) -> {type} | None ## Return the value of a {key}, or None if the {key} is not found.
    {Table} ## delete(self, {key}: {type}) -> bool ## Delete a {key}, return whether it was there.
    {Table} ## _hash(self, {key}: {type}) -> int ## Return the <bucket|slot> of a {key} with the <division|multiplication> method.
    {Table} ## resize(self, capacity: int) -> None ## Change the capacity of the {table} and rehash its entries.
    {Table} ## load_factor(self) -> float ## Return the number of entries divided by the capacity.
    {Matrix} ## transpose(self) -> Matrix ## Return the transposed matrix.
    {Matrix} ## determinant(self) -> float ## Return the determinant of a square matrix by <cofactor expansion|Gaussian elimination>.
    {Matrix} ## __<add|sub|mul>__(self, other: Matrix) -> Matrix ## <Add two matrices of the same shape.|Subtract another matrix.|Multiply by a matrix or a scalar.>
    {Matrix} ## <row|column>(self, index: int) -> list[float] ## Return the <row|column> with the given index as a list.
    {Matrix} ## is_symmetric(self) -> bool ## Return True if the matrix equals its transpose.
    {Matrix} ## dot(self, other: list[float]) -> list[float] ## Multiply the matrix by a vector.
    {Vector} ## norm(self) -> float ## Return the Euclidean <norm|length> of the vector.
    {Vector} ## __<add|sub|eq>__(self, other: Vector) -> Vector ## <Add|Subtract|Compare> two vectors component by component. Raises ValueError if the sizes differ.
    {Vector} ## angle(self, other: Vector, deg: bool = False) -> float ## Return the angle between two vectors in radians, or in degrees if deg is True.
    {Account} ## deposit(self, amount: float) -> None ## Add an amount to the balance. Raises ValueError if the amount is not positive.
    {Account} ## withdraw(self, amount: float) -> bool ## Take an amount from the balance if there is enough <money|of it>. Returns whether it worked.
    {Account} ## transfer(self, other: Account, amount: float) -> None ## Move an amount to another account.
    {Account} ## add_interest(self, rate: float) -> float ## Add interest to the balance and return the new balance.
    {Cipher} ## <encrypt|encode>(self, <text|message|plaintext>: str) -> str ## <Encrypt|Encode> a <text|message> with the <key|alphabet> of the {cipher}.
    {Cipher} ## <decrypt|decode>(self, <text|message|ciphertext>: str) -> str ## Reverse the {cipher} and return the original text.
    {Cipher} ## generate_key(self, length: int) -> str ## Generate a random key of the given length.
    {Network} ## forward(self, x: np.ndarray) -> np.ndarray ## Compute the output of the network for an input. :param x: input of shape (batch, features)
    {Network} ## backward(self, grad: np.ndarray) -> None ## Propagate the gradient back and update the weights.
    {Network} ## <train|fit>(self, x: np.ndarray, y: np.ndarray, epochs: int = 10) -> None ## Train the model on the samples x with the labels y.
    {Network} ## predict(self, x: np.ndarray) -> np.ndarray ## Predict a label for each row of x.
    {Network} ## <loss|cost>(self, y_true: np.ndarray, y_pred: np.ndarray) -> float ## Return the mean <squared error|cross entropy> of the predictions.
    {Network} ## <sigmoid|relu|softmax|tanh>(self, x: np.ndarray) -> np.ndarray ## Apply the activation function to every element.
    {Scheduler} ## calculate_<waiting|turnaround>_times(self) -> list[int] ## Calculate the <waiting|turnaround> time of each process.
    {Scheduler} ## next_process(self) -> Process | None ## Return the process with the <highest priority|shortest remaining time>, None if all are done.
    {Scheduler} ## run(self, quantum: int) -> list[str] ## Run all processes with the given time quantum and return the order in which they finish.
    {Game} ## is_<valid|legal>_move(self, row: int, column: int) -> bool ## Check whether a move to the given cell is allowed.
    {Game} ## <winner|check_winner>(self) -> str | None ## Return the <player|mark> that has won the game, or None.
    {Game} ## reset(self) -> None ## Start a new game with an empty board.
    {Game} ## count_neighbors(self, row: int, column: int) -> int ## Count the <living|occupied> cells around a cell.
    {Set} ## find(self, {item}: int) -> int ## Find the representative of the set of {item}, with path compression.
    {Set} ## union(self, a: int, b: int) -> bool ## Merge the sets of a and b by <rank|size>. Returns False if they are already the same set.
    {Trie} ## insert(self, word: str) -> None ## Insert a word into the trie. :param word: the word to be inserted
    {Trie} ## starts_with(self, prefix: str) -> bool ## Return True if there is a word in the trie that starts with the prefix.
    {Trie} ## find(self, word: str) -> bool ## Try to find a word in the trie. :return: True if the word is found
    {Trie} ## delete(self, word: str) -> None ## Delete a word from the trie, and the nodes that no other word needs.
    {Segment} ## update(self, index: int, value: int) -> None ## Set the value at index and update the tree in O(log n).
    {Segment} ## query(self, left: int, right: int) -> int ## Return the <sum|minimum|maximum> of the values from left to right, both inclusive.
    {Segment} ## build(self, node: int, left: int, right: int) -> None ## Build the tree over the interval from left to right.
""")

RULES = rules("""
    store: collection | container | structure | buffer
    Store: Stack | Queue | Deque | CircularQueue | ArrayStack | LinkedStack | PriorityQueue | QueueByList | StackWithQueues | Bag | RingBuffer
    onto: onto | to the end of | into
    item: item | value | data | element | x
    key: key | value | label
    type: int | T | Any | str | float
    Linked: LinkedList | DoublyLinkedList | SinglyLinkedList | CircularLinkedList | LinkedDeque | SkipList
    Tree: BinaryTree | BinarySearchTree | AVLTree | RedBlackTree | Treap | SplayTree | Node | BTree
    Graph: Graph | DirectedGraph | UndirectedGraph | WeightedGraph | AdjacencyList | FlowNetwork | GridGraph
    Heap: MinHeap | MaxHeap | BinaryHeap | Heap | BinomialHeap | FibonacciHeap
    table: table | cache | map
    Table: HashTable | HashMap | LRUCache | LFUCache | DoubleHash | QuadraticProbing | OrderedMap
    Matrix: Matrix | SquareMatrix | SparseMatrix
    Vector: Vector | Vector3D | Point
    Account: Account | BankAccount | SavingsAccount | Wallet
    cipher: cipher | code
    Cipher: CaesarCipher | VigenereCipher | HillCipher | PlayfairCipher | XORCipher | MorseCode | HuffmanCoder | OneTimePad
    Network: Perceptron | NeuralNetwork | LinearRegression | LogisticRegression | DecisionTree | KMeans | NaiveBayes | DenseLayer | SVM
    Scheduler: RoundRobin | Scheduler | MLFQ | FCFS
    Game: TicTacToe | GameOfLife | Board | Sudoku | ConnectFour | Maze | ChessBoard
    Set: DisjointSet | UnionFind
    Trie: Trie | TrieNode | RadixTree | PrefixTree
    Segment: SegmentTree | FenwickTree | SparseTable | LazySegmentTree
""")
