//! Time slices for long loops, so that other tasks run.

use super::yield_now;

/// Divides a long loop into slices, after each of which every other ready task runs once. A request whose work grows
/// with its length uses one, so that it does not occupy the loop's thread.
///
/// Other tasks may run in [`WorkSlice::complete_steps`], so the caller must recheck all state that they may change.
#[derive(Debug)]
pub struct WorkSlice {
    steps_max: u64,
    steps: u64,
}

impl WorkSlice {
    /// Creates slices of `steps_max` steps; of one if `steps_max` is zero.
    pub fn new(steps_max: u64) -> Self {
        Self { steps_max, steps: 0 }
    }

    /// Counts `steps` completed steps, and yields at the end of a slice.
    #[inline]
    pub async fn complete_steps(&mut self, steps: u64) {
        self.steps += steps;
        if self.steps >= self.steps_max {
            self.steps = 0;
            yield_now().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;
    use crate::event_loop::Loop;

    #[test]
    fn other_tasks_run_between_slices() {
        let on = Loop::simulated().expect("a loop");
        let done = Rc::new(Cell::new(0_u64));
        let observed = Rc::clone(&done);
        let longest = on.block_on(async {
            let watch = on.spawn_with_result(async move {
                let (mut last, mut longest) = (0, 0);
                while last < 1000 {
                    longest = longest.max(observed.get() - last);
                    last = observed.get();
                    yield_now().await;
                }
                longest
            });
            let mut slice = WorkSlice::new(8);
            for _ in 0..1000 {
                done.set(done.get() + 1);
                slice.complete_steps(1).await;
            }
            watch.await
        });
        assert_eq!(longest, 8);
    }
}
