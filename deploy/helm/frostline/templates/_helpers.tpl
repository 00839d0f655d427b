{{- define "frostline.labels" -}}
app.kubernetes.io/name: frostline
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "frostline.account" -}}
{{ .Values.serviceAccount.name | default .Release.Name }}
{{- end }}

{{/* With tenants /v1/health wants a token, which a probe has not; the description is for everybody. */}}
{{- define "frostline.probe" -}}
httpGet:
  path: {{ if .Values.open }}/v1/health{{ else }}/v1/openapi.json{{ end }}
  port: http
{{- end }}
