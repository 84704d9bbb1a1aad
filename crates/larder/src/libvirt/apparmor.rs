//! AppArmor: the QEMU of a domain may connect to the sockets of that domain's disks, and to no others of Larder's.
//!
//! libvirt loads a profile for each domain that starts, `/etc/apparmor.d/libvirt/libvirt-UUID`. It makes that file from a
//! template where there is none, and keeps one that is there; what the domain's XML calls for is in another file,
//! `libvirt-UUID.files`, which it writes anew each time. `virt-aa-helper` of libvirt 9.0 writes sockets of vhost-user network
//! cards there, and none of vhost-user disks. So the hook writes those into the profile: libvirt calls it before it loads that
//! (`qemuProcessInit`; `AppArmorGenSecurityLabel` comes later).

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use super::kept::{self, Kept};

/// The folder of the profiles of domains.
const FOLDER: &str = "/etc/apparmor.d/libvirt";

/// What libvirt makes a profile from, and what stands for its name there.
const TEMPLATE: &str = "TEMPLATE.qemu";
const NAME_IN_TEMPLATE: &str = "LIBVIRT_TEMPLATE";

/// The lines around the rules.
const BEGIN: &str = "  # Larder: the sockets of the disks that it serves to this domain, written by its libvirt hook.";
const END: &str = "  # Larder: end.";

/// Allows the QEMU of a domain the sockets of its disks, where libvirt has profiles of AppArmor.
///
/// # Errors
/// The profile cannot be written, or a rule cannot name the sockets.
pub(super) fn allow(uuid: &str, sockets: &[&Path]) -> anyhow::Result<()> {
    let folder = Path::new(FOLDER);
    let Some(template) = Kept::read(&folder.join(TEMPLATE))? else {
        return Ok(());
    };
    let rules = sockets
        .iter()
        .map(|socket| rule(socket))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let path = profile(uuid);
    let before = Kept::read(&path)?;
    let name = format!("libvirt-{uuid}");
    let bare = match &before {
        // libvirt makes an empty one anew.
        Some(text) if !text.trim().is_empty() => without_rules(text),
        _ => with_lines(
            &template.replace(NAME_IN_TEMPLATE, &name),
            &[format!("  #include <libvirt/{name}.files>")],
        )
        .with_context(|| format!("{FOLDER}/{TEMPLATE}: it has no profile"))?,
    };
    let lines: Vec<String> = [BEGIN.to_owned()]
        .into_iter()
        .chain(rules)
        .chain([END.to_owned()])
        .collect();
    let after = with_lines(&bare, &lines).with_context(|| format!("{}: it has no profile", path.display()))?;
    match before.as_ref() == Some(&after) {
        true => Ok(()),
        false => kept::write(&path, &after, 0o644, true),
    }
}

/// Takes all that back.
///
/// # Errors
/// The profile cannot be written.
pub(super) fn forbid(uuid: &str) -> anyhow::Result<()> {
    let path = profile(uuid);
    let Some(before) = Kept::read(&path)? else {
        return Ok(());
    };
    let after = without_rules(&before);
    match after == before {
        true => Ok(()),
        false => kept::write(&path, &after, 0o644, true),
    }
}

fn profile(uuid: &str) -> PathBuf {
    Path::new(FOLDER).join(format!("libvirt-{uuid}"))
}

/// The rule for a socket. Characters that mean something to AppArmor are in no path that Larder chooses.
fn rule(socket: &Path) -> anyhow::Result<String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-:+ ".contains(c);
    match socket.to_str() {
        Some(text) if text.starts_with('/') && text.chars().all(is_plain) => Ok(format!("  \"{text}\" rw,")),
        _ => bail!(
            "{}: a rule of AppArmor cannot name it; give the socket a path of letters, digits, '.', '_' and '-'",
            socket.display()
        ),
    }
}

/// A profile without the rules that were written here.
fn without_rules(profile: &str) -> String {
    let mut text = String::new();
    let mut is_ours = false;
    for line in profile.split_inclusive('\n') {
        match line.trim_end() {
            BEGIN => is_ours = true,
            END if is_ours => is_ours = false,
            _ if is_ours => {}
            _ => text.push_str(line),
        }
    }
    text
}

/// A profile with these lines at its end; `None` if it does not end.
fn with_lines(profile: &str, lines: &[String]) -> Option<String> {
    let end = profile.rfind('}')?;
    let (body, rest) = profile.split_at(end);
    let body = body.trim_end();
    Some(format!("{body}\n{}\n{rest}", lines.join("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROFILE: &str = "#include <tunables/global>\n\nprofile libvirt-1 flags=(attach_disconnected) {\n  #include <abstractions/libvirt-qemu>\n  #include <libvirt/libvirt-1.files>\n}\n";

    /// Rules are written inside the profile, and taken back without a trace.
    #[test]
    fn rules_come_and_go() {
        let lines = [
            BEGIN.to_owned(),
            rule(Path::new("/run/larder/web-vda.sock")).expect("can be named"),
            END.to_owned(),
        ];
        let with = with_lines(PROFILE, &lines).expect("it ends");
        assert!(
            with.ends_with(&format!("\n  \"/run/larder/web-vda.sock\" rw,\n{END}\n}}\n")),
            "{with}"
        );
        assert_eq!(without_rules(&with), PROFILE);
        assert_eq!(without_rules(PROFILE), PROFILE);
        assert_eq!(with_lines("", &lines), None);
    }

    /// A path cannot widen its rule.
    #[test]
    fn paths_that_mean_more_are_refused() {
        for path in [
            "/run/larder/*.sock",
            "/run/{a,b}",
            "/run/a\" rw, / rw,",
            "/run/a\n",
            "@{HOME}/x",
            "relative",
        ] {
            rule(Path::new(path)).expect_err(path);
        }
    }
}
