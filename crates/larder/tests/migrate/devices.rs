//! Compression devices, by their libraries without the device: QATzip in the chroot that has it.

use larder_bench::campaign::guest::project;
use larder_bench::campaign::process::install_script;

use crate::ends::{Waiting, carries_on, write};
use crate::support::{larder_path, temp_dir_on_tmpfs};

/// Returns compressible text of `pages` distinct pages, which is no guest's stream.
fn text(pages: usize) -> Vec<u8> {
    let words = ["disk", "memory", "page", "guest", "link", "cache", "host", "block"];
    let mut state = 1_u64;
    let mut out = Vec::new();
    while out.len() < pages * 4096 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        out.extend_from_slice(words[(state >> 60) as usize % words.len()].as_bytes());
        out.extend_from_slice(format!(" {:x} ", state >> 48).as_bytes());
    }
    out
}

/// Carries the text by a sender with these arguments, and returns the sender's output.
fn carried(words: &[&str]) -> String {
    // The sender runs in the chroot, and loads the library there.
    let folder = temp_dir_on_tmpfs();
    let in_chroot = folder.path().join("larder");
    let script =
        format!("#!/bin/sh\nexec {}/testbed/debian13.sh {} \"$@\"\n", project().display(), larder_path().display());
    install_script(&script, &in_chroot);
    let words = [&["--bandwidth", "8MiB"], words].concat();
    let mut between = Waiting::start(&[]).joined_with(&in_chroot, &words);
    let stream = text(4096);
    let writer = write(between.source(), stream.clone());
    carries_on(&mut between, &stream, || writer.join().expect("written"))
}

/// Returns the number of pages that a device has encoded, from the summary.
fn pages_by_device(said: &str) -> u64 {
    let line = said.lines().find_map(|line| line.trim().strip_prefix("by a device:"));
    line.map_or(0, |line| {
        let count = line.trim().split(' ').next().expect("a number");
        count.parse().expect("a number")
    })
}

#[test]
fn device_library_pages_arrive_intact() {
    let said = carried(&["--accelerators", "software"]);
    assert!(said.contains(" and qat"), "{said}");
    // On a busy machine the device is used only occasionally.
    assert!(pages_by_device(&said) > 0, "{said}");
    // Without a device its library is used only on request.
    for words in [&["--accelerators", "none"][..], &[]] {
        let said = carried(words);
        assert!(!said.contains("qat") && pages_by_device(&said) == 0, "{said}");
    }
}
