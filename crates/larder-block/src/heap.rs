//! The heap of the process.

/// Gives the kernel what of the heap is free. For who has freed much that is not needed again soon: the allocator of the C
/// library keeps for later about as much as the largest pieces that it was given back.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it touches nothing but the allocator's own, under its locks.
    unsafe {
        libc::malloc_trim(0);
    }
}
