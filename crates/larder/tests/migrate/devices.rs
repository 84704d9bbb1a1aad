//! Devices that compress, by their libraries without the device: QATzip's in the chroot that has it.

use larder_bench::campaign::guest::project;
use larder_bench::campaign::process::install_script;

use crate::ends::{Waiting, carries_on, write};
use crate::support::{larder, on_tmpfs};

/// Text of pages that are all different, with 8 bytes before each that make it no guest's.
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

/// Carries it by a sender with these words; what that said.
fn carried(words: &[&str]) -> String {
    // The sender's own library, or the chroot's.
    let folder = on_tmpfs();
    let in_chroot = folder.path().join("larder");
    let script = format!(
        "#!/bin/sh\nexec {}/testbed/debian13.sh {} \"$@\"\n",
        project().display(),
        larder().display()
    );
    install_script(&script, &in_chroot);
    let words = [&["--bandwidth", "8MiB"], words].concat();
    let mut between = Waiting::start(&[]).joined_with(&in_chroot, &words);
    let stream = text(4096);
    let writer = write(between.source(), stream.clone());
    carries_on(&mut between, &stream, || writer.join().expect("written"))
}

/// Pages that a device has made, as the summary says.
fn pages_by_device(said: &str) -> u64 {
    let line = said.lines().find_map(|line| line.trim().strip_prefix("by a device:"));
    line.map_or(0, |line| {
        let count = line.trim().split(' ').next().expect("a number");
        count.parse().expect("a number")
    })
}

#[test]
fn a_library_of_a_device_makes_pages_that_arrive_as_they_were() {
    let said = carried(&["--accelerators", "software"]);
    assert!(said.contains(" and qat"), "{said}");
    // On a busy machine it is only tried now and then.
    assert!(pages_by_device(&said) > 0, "{said}");
    // Without a device it is only used if that is asked for.
    for words in [&["--accelerators", "none"][..], &[]] {
        let said = carried(words);
        assert!(!said.contains("qat") && pages_by_device(&said) == 0, "{said}");
    }
}
