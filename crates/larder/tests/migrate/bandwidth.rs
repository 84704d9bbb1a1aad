//! `larder migrate --bandwidth`.

use std::time::Instant;

use crate::ends::{Waiting, carries_on, write};
use crate::support::test_pattern;

#[test]
fn bandwidth_limit_is_kept() {
    const MIB: usize = 1 << 20;
    let mut between = Waiting::start(&[]).joined(&["--bandwidth", "4MiB"]);
    let stream = test_pattern(3, 8 * MIB);
    let begun = Instant::now();
    let writer = write(between.source(), stream.clone());
    carries_on(&mut between, &stream, || writer.join().expect("written"));
    let seconds = begun.elapsed().as_secs_f64();
    let carried = between.relay.carried();
    assert!(carried >= stream.len() as u64, "{carried} bytes for what cannot become less");
    // The lanes' initial allowance is sent at once, and the last frames need not be waited for.
    let allowed = (seconds * 4.0 + 1.5) * MIB as f64;
    assert!(carried as f64 <= allowed, "{carried} bytes in {seconds} s");
}
