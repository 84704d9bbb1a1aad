//! Queries that run at the same time.

/// Calls `query` for each item, each in a thread of its own, so that one that hangs does not delay the others. Returns
/// the results in the order of the items.
pub(crate) fn query_each<T: Sync, R: Send>(items: &[T], query: impl Fn(&T) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let query = &query;
        let threads: Vec<_> = items.iter().map(|item| scope.spawn(move || query(item))).collect();
        // A panic in a thread aborts the process, so `join` does not fail.
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    })
}
