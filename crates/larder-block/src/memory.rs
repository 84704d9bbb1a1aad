//! Memory of the process.

/// Gives the kernel what of the heap is free. For who has freed much that is not needed again soon: the allocator of the C
/// library keeps for later about as much as the largest pieces that it was given back.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it touches nothing but the allocator's own, under its locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Asks memory for what is there, and does not wait for it.
pub fn prefetch(of: &u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: it changes nothing, and has no effect that is not one of time.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(std::ptr::from_ref(of).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = of;
}
