//! The files for Grafana and Prometheus in the package fit the program's metrics.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde_json::Value;

use super::metrics::{busy, names};
use super::support::run_tool;
use super::{User, text};

fn file(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging")).join(name)
}

/// Returns all words that look like a metric's name.
fn named(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("larder_")).map(str::to_owned).collect()
}

#[test]
fn dashboards_and_rules_use_existing_metrics() {
    let user = User::new();
    let (_vm, host) = busy(&user);
    let (told, _) = names(&host.metrics());
    for name in ["grafana/larder.json", "prometheus/larder.rules.yml"] {
        let text = std::fs::read_to_string(file(name)).expect("is there");
        let used = named(&text);
        let unknown: Vec<&String> = used.difference(&told).collect();
        assert!(unknown.is_empty() && used.len() > 8, "{name}: {unknown:?}");
    }
}

#[test]
fn alert_rules_pass_promtool_tests() {
    run_tool("promtool", &["check", "rules", text(&file("prometheus/larder.rules.yml"))]);
    run_tool("promtool", &["test", "rules", text(&file("prometheus/larder.rules.test.yml"))]);
}

#[test]
fn dashboard_has_selectable_data_source() {
    let dashboard = std::fs::read_to_string(file("grafana/larder.json")).expect("is there");
    let dashboard: Value = serde_json::from_str(&dashboard).expect("it is JSON");
    let variables = dashboard["templating"]["list"].as_array().expect("a list");
    assert!(variables.iter().any(|variable| variable["type"] == "datasource"));
    let panels = dashboard["panels"].as_array().expect("a list");
    let mut ids = BTreeSet::new();
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64()), "two panels with one number");
        for target in panel["targets"].as_array().into_iter().flatten() {
            assert_eq!(target["datasource"]["uid"], "${source}", "{panel}");
            let expression = target["expr"].as_str().expect("an expression");
            assert!(expression.contains("domain=~\"$domain\""), "{expression}");
        }
    }
    assert!(panels.len() > 8);
}
