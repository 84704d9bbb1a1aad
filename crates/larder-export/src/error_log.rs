//! Failed requests of a disk in the log, whichever way it is served.

use larder_block::IoError;

/// Failures that are all told.
const TOLD_ALL: u64 = 10;

/// Tells of a failure, the `number`th of an export. A dead disk fails every request: the log gets the first ten, then
/// every power of two.
pub(crate) fn report(number: u64, error: &IoError) {
    if number <= TOLD_ALL || number.is_power_of_two() {
        tracing::error!(errors = number, "{error}");
    }
}
