//! Answer to whether one more VM would fit.

use serde::Serialize;

use super::format::{percent, size};
use super::{AdvicePolicy, Headroom};
use crate::measured::Measured;

/// Answer, which programs receive as the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fit {
    /// The VM fits even if all VMs use all their memory.
    Fits,
    /// The VM does not fit even if only active memory counts.
    DoesNotFit,
    /// The VM fits only if active memory alone counts, or VMs already wait for memory.
    OnlyOvercommitted,
    /// A value that the answer needs is unknown.
    CannotTell,
}

/// Answer with its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WouldFit {
    /// Memory of the VM in question, in bytes.
    pub size: u64,
    /// Answer for programs.
    pub answer: Fit,
    /// Sentence that explains the answer to the operator.
    pub text: String,
}

impl WouldFit {
    pub(super) fn new(bytes: u64, measured: &Measured, policy: &AdvicePolicy, room: &Headroom) -> Self {
        let (answer, why) = answer(bytes, measured, policy, room);
        let verdict = match answer {
            Fit::Fits => "fits",
            Fit::DoesNotFit => "does not fit",
            Fit::OnlyOvercommitted if room.stall.is_some_and(|stall| stall > policy.stall) => {
                "fits only at a stall above the accepted one"
            }
            Fit::OnlyOvercommitted => "fits only with over-commit",
            Fit::CannotTell => "cannot be determined",
        };
        Self { size: bytes, answer, text: format!("a VM of {}: {verdict}: {why}", size(bytes)) }
    }
}

/// Returns the answer and its reason. Unknown memory counts as little as possible: if the VM does not fit even so,
/// that is certain.
fn answer(bytes: u64, measured: &Measured, policy: &AdvicePolicy, room: &Headroom) -> (Fit, String) {
    let fits_committed = u64::try_from(room.spare_committed).is_ok_and(|spare| bytes <= spare);
    let capacity = room.capacity_text(policy);
    let facts = format!("{capacity}, and VMs were given {}", size(room.committed));
    let stall_text = room.stall.filter(|stall| *stall > policy.stall).map(|stall| {
        format!(
            "tasks already wait for memory {} of the time, more than the {} that are accepted",
            percent(stall),
            percent(policy.stall)
        )
    });
    if !fits_committed {
        let share = room.active_share();
        let active = (bytes as f64 * share.unwrap_or(1.0)) as u64;
        let assumption = match share {
            Some(share) => format!("if it is used like the others ({})", percent(share)),
            None => "if all of it is used".to_owned(),
        };
        let fits_active = u64::try_from(room.spare_active).is_ok_and(|spare| active <= spare);
        let fits_overcommit = u64::try_from(room.spare_overcommit).is_ok_and(|spare| bytes <= spare);
        if !fits_overcommit {
            let limit = size((room.capacity as f64 * policy.overcommit) as u64);
            let reason =
                format!("{facts}; all VMs together may be given at most {limit} ({})", percent(policy.overcommit));
            return (Fit::DoesNotFit, reason);
        }
        let facts_with_active = format!(
            "{facts}; at most {} are active, and {} more would be {assumption}, of {} that are allowed",
            size(room.active.saturating_add(room.others)),
            size(active),
            size((room.capacity as f64 * policy.active_share) as u64)
        );
        if !fits_active {
            return (Fit::DoesNotFit, facts_with_active);
        }
        if let Some(reason) = unknown_reason(measured, room, &facts) {
            return (Fit::CannotTell, reason);
        }
        let why = match (stall_text, room.stall) {
            (Some(stall_text), _) => format!("{facts_with_active}; {stall_text}"),
            (None, Some(stall)) => format!("{facts_with_active}; tasks wait for memory {} of the time", percent(stall)),
            (None, None) => format!("{facts_with_active}; how long VMs wait for memory is not measured"),
        };
        return (Fit::OnlyOvercommitted, format!("{why}{}", no_swap_warning(measured)));
    }
    if let Some(reason) = unknown_reason(measured, room, &facts) {
        return (Fit::CannotTell, reason);
    }
    let remaining = size(u64::try_from(room.spare_committed).unwrap_or_default() - bytes);
    match stall_text {
        Some(stall_text) => (Fit::OnlyOvercommitted, format!("{facts}, so it has room; but {stall_text}")),
        None => (Fit::Fits, format!("{facts}; {remaining} would be left")),
    }
}

fn unknown_reason(measured: &Measured, room: &Headroom, facts: &str) -> Option<String> {
    if !room.unknown.is_empty() {
        let vms = room.unknown.join(", ");
        return Some(format!("{facts} at least, but the given or the resident memory of {vms} is unknown"));
    }
    let unanswered = measured.silent.join(", ");
    (!unanswered.is_empty())
        .then(|| format!("{facts}, but Larder does not answer at {unanswered}, so VMs may wait for memory"))
}

/// Returns a warning if there is no swap and no pager, because over-committed memory must be evicted to somewhere.
fn no_swap_warning(measured: &Measured) -> &'static str {
    let has_swap = measured.host.swap_total > 0;
    match has_swap || measured.vms.iter().any(|vm| vm.managed.is_some()) {
        true => "",
        false => {
            "; but there is nowhere for memory that is not active: the host has no swap, and no VM has a budget (larder memory \
             attach)"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::headroom::tests::{GIB, host, managed, vm};
    use super::*;
    use crate::measured::MeasuredVm;

    fn fit(gib: u64, measured: &Measured) -> (Fit, String) {
        let policy = AdvicePolicy::default();
        let answer = WouldFit::new(gib * GIB, measured, &policy, &Headroom::new(measured, &policy));
        (answer.answer, answer.text)
    }

    /// Without over-commit a VM fits if the memory promised to all VMs does.
    #[test]
    fn vm_fits_without_overcommit() {
        // 100 GiB less 1 GiB of other processes and 40 GiB of VMs leave 59 GiB.
        let four = host(vec![vm(10, 2); 4]);
        let cases = [
            (1, Fit::Fits),
            (59, Fit::Fits),
            // 150 GiB may be given.
            (60, Fit::OnlyOvercommitted),
            (109, Fit::OnlyOvercommitted),
            (110, Fit::DoesNotFit),
        ];
        for (gib, answer) in cases {
            assert_eq!(fit(gib, &four).0, answer, "{gib}");
        }
        // 1 + 60 of 80 GiB are active. A VM of 25 GiB would add 18.75 GiB, and one of 26 GiB 19.5.
        let busy = host(vec![vm(40, 30); 2]);
        assert_eq!((fit(25, &busy).0, fit(26, &busy).0), (Fit::OnlyOvercommitted, Fit::DoesNotFit));
        // Without other VMs there is no typical use, so all of the memory counts as active.
        let empty = host(Vec::new());
        assert_eq!(fit(99, &empty).0, Fit::Fits);
        assert_eq!(fit(100, &empty).0, Fit::DoesNotFit);
        assert_eq!(fit(1 << 20, &empty).0, Fit::DoesNotFit);
    }

    #[test]
    fn stall_above_policy_leaves_no_room() {
        let mut waits = host(vec![vm(10, 2)]);
        waits.host.memory_stall = Some(0.051);
        assert_eq!(fit(1, &waits).0, Fit::OnlyOvercommitted);
        assert!(fit(1, &waits).1.contains("fits only at a stall above the accepted one"), "{}", fit(1, &waits).1);
        waits.host.memory_stall = Some(0.05);
        assert_eq!(fit(1, &waits).0, Fit::Fits);
        // Without over-commit no VM waits for memory that another VM occupies.
        waits.host.memory_stall = None;
        assert_eq!(fit(1, &waits).0, Fit::Fits);
        assert_eq!(fit(1, &host(vec![managed(10, 2, 0.3)])).0, Fit::OnlyOvercommitted);
        // With such a stall all 79 GiB of the VM may be active, which leaves 80 - 1 - 79 = 0 GiB.
        assert_eq!(fit(98, &host(vec![managed(79, 2, 0.3)])).0, Fit::DoesNotFit);
    }

    /// Unknown values make the answer unknown, unless the VM does not fit in any case.
    #[test]
    fn unknown_values_make_fit_unknown() {
        let unread = MeasuredVm { name: "db".to_owned(), pid: 9, ram: Some(10 * GIB), ..MeasuredVm::default() };
        let unsized_vm = MeasuredVm { ram: None, ..vm(0, 70) };
        assert_eq!(fit(1, &host(vec![unread.clone()])).0, Fit::CannotTell);
        assert!(fit(1, &host(vec![unread])).1.contains("of db (PID 9) is unknown"));
        assert_eq!(fit(1, &host(vec![unsized_vm.clone()])).0, Fit::CannotTell);
        assert_eq!(fit(30, &host(vec![unsized_vm])).0, Fit::DoesNotFit);
    }

    #[test]
    fn silent_server_makes_fit_unknown() {
        let mut measured = host(vec![vm(10, 2)]);
        measured.silent.push("/run/m.sock".to_owned());
        assert_eq!((fit(1, &measured).0, fit(200, &measured).0), (Fit::CannotTell, Fit::DoesNotFit));
        assert!(fit(1, &measured).1.contains("Larder does not answer at /run/m.sock"));
    }

    /// The answer warns of over-commit without swap and without a pager.
    #[test]
    fn overcommit_without_swap_is_warned_of() {
        let mut measured = host(vec![vm(10, 2); 4]);
        assert!(fit(60, &measured).1.contains("nowhere for memory"));
        measured.host.swap_total = GIB;
        assert!(!fit(60, &measured).1.contains("nowhere for memory"));
        assert_eq!(
            fit(60, &measured).1,
            "a VM of 60 GiB: fits only with over-commit: the host has 100 GiB for VMs, without a reserve of 1 GiB; others use \
             1 GiB of it, and VMs were given 40 GiB; at most 9 GiB are active, and 12 GiB more would be if it is used like \
             the others (20 %), of 80 GiB that are allowed; tasks wait for memory 0 % of the time"
        );
    }
}
